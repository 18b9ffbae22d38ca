"""Everything that a GPU is for, most important first, each part with a limit of seconds; what was done is kept.

python benchmarks/on_a_gpu.py                 # tests, benchmarks, studies; the same command resumes
python benchmarks/on_a_gpu.py --dry           # all of it at toy size on the CPU
python benchmarks/on_a_gpu.py --only studies  # parts whose names begin so
python benchmarks/on_a_gpu.py --list          # the parts, their limits, and what is done

Needs no installation: the source is read from the checkout. Packages that the machine lacks are installed from
wheels/, which `make gpu-wheels` fills on a machine with a package index. Data sets are read from data/, or the folder
that HEADWISE_DATA names. Results: results/gpu, with a file for what each part printed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "verdict" / "src")]

from headwise_verdict.files.errors import StudyError  # noqa: E402
from headwise_verdict.files.ownership import claim  # noqa: E402

OUT = ROOT / "results" / "gpu"
WHEELS, SITE = ROOT / "wheels", ROOT / "build" / "site"
# what an installation of the checkout's packages would tell Python
CHECKOUT = ROOT / "build" / "checkout"
PACKAGES = {"headwise": ROOT, "headwise_verdict": ROOT / "verdict", "headwise_papers": ROOT / "papers"}
DONE, JOBS = "done.json", "side-by-side.json"
# what the parts need beside torch, by the name that is imported
NEEDED = (
    "accelerate altair filelock jinja2 numpy optuna pandas psutil pydantic pytest rich safetensors scipy sklearn "
    "typer vl_convert"
).split()


@dataclass(frozen=True)
class Part:
    """A part: its name, its limit in seconds, its command, and the command of the dry run; "" if it has none."""

    name: str
    seconds: int
    command: str
    dry: str = ""


def study(name: str, seconds: int, options: str, toy: str) -> Part:
    """Return the part of a study; its dry run has two arms, two seeds and the settings `toy`, on made-up data."""
    return Part(
        f"studies-{name}",
        seconds,
        f"-m headwise compare {name} --device cuda --jobs {{jobs}} {options} --out {{out}}/{name}",
        f"benchmarks/dry_study.py {name} --set {toy} --out {{out}}/{name}",
    )


IMAGES = "train_size=64,test_size=64,batch_size=32"
STEPS = f"{IMAGES},steps=2,depth=1,dim=16"
# pyproject.toml makes an error of each warning, also of one about options of a plugin that is not installed here
TESTS = "tests/integration/test_cuda.py -m cuda -o filterwarnings=default"
NEUTRENO = '--method "NeuTRENO(strength=0.6)"'
# The limits before the first study leave it 300 of 900 seconds.
PARTS = (
    Part("tests", 180, f"-m pytest {TESTS} -p no:cacheprovider", f"-m pytest {TESTS} --collect-only"),
    Part("kernels", 90, "benchmarks/kernels_on_cuda.py"),
    Part("drops", 60, "benchmarks/drops_on_cuda.py"),
    Part("edits", 60, "benchmarks/edits_on_cuda.py"),
    Part("rows", 60, "benchmarks/rows_on_cuda.py"),
    Part("readings", 60, "benchmarks/readings_on_cuda.py"),
    Part("steps", 90, "benchmarks/steps_on_cuda.py"),
    study("blog-cifar10", 300, "--scale paper --seeds 3", f"{IMAGES},epochs=1"),
    Part("costs", 120, "benchmarks/cuda_costs.py --measure"),
    Part("steps-float32", 60, "benchmarks/steps_on_cuda.py --dtype float32"),
    Part("steps-compiled", 120, "benchmarks/steps_on_cuda.py --compile"),
    study("blog-cifar100", 300, "--scale paper --seeds 3", f"{IMAGES},epochs=1"),
    study("neutreno-cifar", 360, f"--scale gpu --seeds 3 {NEUTRENO}", f"{IMAGES},steps=2"),
    study("sigma-vit", 600, "--scale gpu", STEPS),
    study("sigma-simclr", 600, "--scale gpu", STEPS),
    study("decay-decoupled", 300, "--scale gpu --seeds 3", "steps=2,test_size=8"),
    study("sigma-lm", 300, "--scale gpu --seeds 3", "steps=2,test_size=8"),
    study("blog-cifar10", 900, "--scale paper --seeds 10", f"{IMAGES},epochs=1"),
    study("blog-cifar100", 900, "--scale paper --seeds 10", f"{IMAGES},epochs=1"),
    Part("attention", 300, "benchmarks/on_cuda.py", "benchmarks/on_cuda.py --dry-run"),
)


def environment() -> dict[str, str]:
    """Return the environment of the parts: the checkout's own source, and what was installed from wheels."""
    folders = [
        ROOT / "src",
        ROOT / "verdict" / "src",
        ROOT / "papers" / "src",
        ROOT / "tests",
        ROOT / "benchmarks",
        SITE,
        CHECKOUT,
    ]
    known = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([*map(str, folders), *([known] if known else [])])
    fixed = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **fixed}


def complete() -> None:
    """Install what is missing from wheels/, or say what to do."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing and not SITE.is_dir() and WHEELS.is_dir():
        wheels = sorted(map(str, WHEELS.glob("*.whl")))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile"]
        subprocess.run([*pip, "--target", str(SITE), *wheels], check=True)
    sys.path.append(str(SITE))
    importlib.invalidate_caches()
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} cannot be imported here. Install them, or run `make gpu-wheels` on a machine with a "
            f"package index and copy its folder wheels/ to {WHEELS}."
        )


def describe_checkout() -> None:
    """Write versions and entry points of the checkout's packages that are not installed: studies are found by them."""
    for package, project in PACKAGES.items():
        try:
            importlib.metadata.version(package.replace("_", "-"))
            continue
        except importlib.metadata.PackageNotFoundError:
            about = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        source = (project / "src" / package / "__init__.py").read_text(encoding="utf-8")
        version = about.get("version") or source.partition('__version__ = "')[2].partition('"')[0]
        folder = CHECKOUT / f"{package}-{version}.dist-info"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {version}\n")
        points = [
            f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in named.items())
            for group, named in about.get("entry-points", {}).items()
        ]
        (folder / "entry_points.txt").write_text("\n".join(points))


def carry_out(part: Part, command: str, folder: Path, seconds: int) -> str:
    """Run a part and return how it ended: done, stopped, or failed with its exit status."""
    with open(folder / f"{part.name}.txt", "a") as stream:
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)], cwd=ROOT, env=environment(), stdout=stream, stderr=stream
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            # a study writes down what it has when it is asked to end, and resumes there
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            return "stopped"
    return "done" if status == 0 else f"failed with {status}"


@contextmanager
def shared_device(wanted: bool) -> Iterator[None]:
    """Let the runs of a study share the device by NVIDIA's MPS, where its daemon can be started."""
    control = shutil.which("nvidia-cuda-mps-control") if wanted else None
    if control is None:
        yield
        return
    folders = {name: str(OUT / "mps" / name) for name in ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")}
    for folder in folders.values():
        Path(folder).mkdir(parents=True, exist_ok=True)
    started = subprocess.run([control, "-d"], env={**os.environ, **folders}).returncode == 0
    print(f"runs share the device by MPS: {'yes' if started else 'its daemon did not start'}", flush=True)
    if started:
        os.environ.update(folders)
    try:
        yield
    finally:
        if started:
            subprocess.run([control], input="quit\n", text=True, env={**os.environ, **folders})
            for name in folders:
                os.environ.pop(name)


def measured_jobs(folder: Path, *, dry: bool) -> int:
    """Return how many runs are fastest side by side: measured once for a folder, with MPS where there is any."""
    kept = folder / JOBS
    if not kept.exists():
        options = ["--device", "cpu", "--counts", "1,2", "--seconds", "0.3"] if dry else []
        command = [sys.executable, "benchmarks/side_by_side.py", *options]
        with shared_device(not dry):
            done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300)
        if done.returncode:
            # the studies can run nonetheless, one after the other
            print(f"runs side by side could not be measured: {done.stderr.strip().splitlines()[-1:]}", flush=True)
            return 1
        kept.write_text(done.stdout.splitlines()[-1])
    found = json.loads(kept.read_text())
    told = ", ".join(f"{count} make {rate:.3g}" for count, rate in found["rates"].items())
    print(f"runs side by side: {found['best']}; steps a second by their number: {told}", flush=True)
    return int(found["best"])


def read_done(folder: Path) -> dict[str, dict[str, object]]:
    """Return how each part ended the last time it ran."""
    path = folder / DONE
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU")
    parser.add_argument("--only", default="", help="the part of this name, or parts whose names begin so")
    parser.add_argument("--seconds", type=int, default=10**9, help="for all parts together")
    parser.add_argument("--jobs", type=int, help="runs at once on one device; default: by a short measurement")
    parser.add_argument("--out", type=Path, help="folder of the results; default: results/gpu")
    parser.add_argument("--again", action="store_true", help="parts that are done too")
    parser.add_argument("--list", action="store_true", help="print the parts and do nothing")
    options = parser.parse_args()
    folder = (options.out or (OUT / "dry" if options.dry else OUT)).resolve()
    written = (DONE, JOBS, *dict.fromkeys(f"{part.name}.txt" for part in PARTS))
    if not options.list:
        try:
            claim(folder, written, shared=True)
        except StudyError as error:
            raise SystemExit(str(error)) from None
    done = read_done(folder)
    named = [part for part in PARTS if part.name == options.only]
    named = named or [part for part in PARTS if part.name.startswith(options.only)]
    # a study with more seeds is the same study in a dry run
    chosen = [part for part in named if part.dry] if options.dry else named
    chosen = list({part.dry if options.dry else part.command: part for part in chosen}.values())
    if options.list:
        for part in chosen:
            print(f"{part.name:28} {part.seconds:4} s  {done.get(part.command, {}).get('ended', 'not run')}")
        return
    complete()
    describe_checkout()
    if not options.dry:
        import torch

        if not torch.cuda.is_available():
            raise SystemExit("torch finds no CUDA device here. --dry walks through all parts on the CPU.")
    ends = time.monotonic() + options.seconds
    failed, jobs = [], options.jobs
    for part in chosen:
        if done.get(part.command, {}).get("ended") == "done" and not options.again:
            continue
        left = int(ends - time.monotonic())
        if left < 5:
            print("the time is over; the same command continues here")
            break
        is_study = part.name.startswith("studies-")
        if is_study and jobs is None:
            jobs = measured_jobs(folder, dry=options.dry)
            left = max(5, int(ends - time.monotonic()))
        begin = time.monotonic()
        command = (part.dry if options.dry else part.command).format(jobs=jobs, out=shlex.quote(str(folder)))
        with shared_device(is_study and not options.dry and (jobs or 1) > 1):
            ended = carry_out(part, command, folder, min(part.seconds, left))
        took = round(time.monotonic() - begin, 1)
        done[part.command] = {"name": part.name, "ended": ended, "seconds": took}
        (folder / DONE).write_text(json.dumps(done, indent=1))
        print(f"{part.name:28} {took:6.1f} s  {ended}", flush=True)
        if ended.startswith("failed"):
            failed.append(part.name)
            print("\n".join((folder / f"{part.name}.txt").read_text().splitlines()[-15:]), flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; what they printed is in {folder}")


if __name__ == "__main__":
    main()
