"""The one thing pyproject.toml cannot say: the description that an index shows is the README without what leads nowhere
there.

An index shows the README alone. Its pictures and its links to files of the repository would be broken, and no address
of the repository is known that could stand before them: pictures go, and of links the words stay.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).resolve().parent / "README.md"
RELATIVE = r"\((?!https?://|mailto:|#)[^()\s]+\)"


def for_an_index(text: str) -> str:
    """Give a Markdown text without relative pictures, with the words of relative links, and without comments."""
    text = re.sub(r"^<picture>.*?</picture>\n+", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(rf"^!\[[^\]]*\]{RELATIVE}\n+", "", text, flags=re.MULTILINE)
    text = re.sub(rf"!\[[^\]]*\]{RELATIVE}", "", text)
    text = re.sub(rf"\[([^\]]*)\]{RELATIVE}", r"\1", text)
    text = re.sub(r"^<!--.*?-->\n", "", text, flags=re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text)


setup(long_description=for_an_index(README.read_text(encoding="utf-8")), long_description_content_type="text/markdown")
