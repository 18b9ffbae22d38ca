"""The entry of the command `headwise` and of `python -m headwise`, which handles stops from the start."""

from headwise.lab.files.stops import end_on_stops


def main() -> None:
    """Handle stops, then import and run the command line."""
    end_on_stops()
    from headwise.cli import main as command

    command()


if __name__ == "__main__":
    main()
