"""Files for download that a piece of HTML holds inside its links; the book makes files of them."""

import base64
from collections.abc import Sequence
from html import escape

import pandas as pd

Files = Sequence[tuple[str, tuple[str, bytes]]]  # (kind, such as CSV, (media type, content))


def download_links(files: Files, name: str) -> str:
    """HTML links for download, each of which holds its file."""
    links = (
        f'<a download="{escape(name, quote=True)}.{kind.lower()}" href="{as_address(*content)}">{kind}</a>'
        for kind, content in files
    )
    return f'<p class="ee-take">{" ".join(links)}</p>'


def as_csv(frame: pd.DataFrame) -> tuple[str, bytes]:
    """A frame as a CSV file, its numbers with six digits."""
    return "text/csv", frame.to_csv(index=False, float_format="%.6g").encode()


def as_address(media_type: str, content: bytes) -> str:
    """Content as a data: address."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"
