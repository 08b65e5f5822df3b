"""Sources of a task's rows: JSON Lines files, plain texts, the hub, sacreBLEU."""

import copy
import gzip
import os
import zlib
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from eelib.common.errors import InputError
from eelib.common.values import first_line, parsed
from eelib.tasks.classification import GLUE

WMT22 = ("de-en", "de-fr", "en-de", "en-ja", "en-ru", "en-zh", "fr-de", "ja-en", "ru-en", "zh-en")  # P, Table 7
HUB: dict[str, tuple[str, str | None, str]] = {  # dataset, config and split, as P and M use them
    "cnn_dailymail": ("abisee/cnn_dailymail", "3.0.0", "validation"),
    "narrativeqa": ("deepmind/narrativeqa", None, "test"),
    "squad": ("rajpurkar/squad", None, "validation"),
    # GLUE's test splits hide their labels
    **{f"glue/{name}": ("nyu-mll/glue", name, "validation" + "_matched" * (name == "mnli")) for name in GLUE},
}
Row = tuple[str, dict]  # (where it stands, for messages; its fields)


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """(place, text) of the lines of a file; InputError names the file and the line that can't be read."""
    number = 0
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                at = f"{path}, line {number}"
                try:
                    yield at, line.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError:
                    raise InputError(f"{at}: not UTF-8") from None
    except (EOFError, OSError, zlib.error) as error:
        raise InputError(f"{path}, after line {number}: can't be read ({first_line(error)})") from None


def read_rows(path: Path) -> list[Row]:
    """Rows of a JSON Lines file, or of a plain text (.txt), with their places; the errors of `lines_of`."""
    if path.suffix == ".txt":
        return paragraphs(path)
    rows: list[Row] = []
    for at, line in lines_of(path):
        row = parsed(line)
        if not isinstance(row, dict):
            raise InputError(f"{at}: not a JSON object")
        rows.append((at, row))
    return rows


def paragraphs(path: Path) -> list[Row]:
    """A row {"text"} for each paragraph of a plain text, with the place of its first line; empty lines separate two."""
    rows: list[Row] = []
    for filled, lines in groupby(lines_of(path), lambda line: bool(line[1].strip())):
        if filled:
            places, texts = zip(*lines)
            rows.append((places[0], {"text": "".join(texts).replace("\r\n", "\n").rstrip("\n")}))
    return rows


def hub_rows(name: str, source: str | None) -> Iterable[dict]:
    """Rows of a hub dataset, or of a local copy in a format that `datasets` loads, one by one: a row may be a book."""
    import datasets

    dataset, config, split = HUB[name]
    try:
        if source and config not in datasets.get_dataset_config_names(source):
            config = None
        return datasets.load_dataset(source or dataset, config, split=split)
    except Exception as error:  # datasets raises many kinds; the reader needs one line
        raise InputError(f"task {name!r} could not be loaded from {source or dataset}: {first_line(error)}") from error


def wmt22_rows(pair: str, source: str | None) -> list[dict]:
    """WMT22 general test of one pair, through sacreBLEU; `source` is a folder to use as its cache."""
    if pair not in WMT22:
        raise InputError(f"direction {pair!r} is not one of P's Table 7; allowed: {', '.join(WMT22)}")
    from sacrebleu.dataset import DATASETS

    data = copy.copy(DATASETS["wmt22"])
    if source:  # sacreBLEU settles on its cache folder when it is imported
        data._outdir = os.path.join(source, "wmt22")
        data._rawdir = os.path.join(data._outdir, "raw")
        data.maybe_download = lambda: None  # type: ignore[method-assign]  # of this copy alone
    try:
        files = [data.get_source_file(pair), *data.get_reference_files(pair)]
        texts = [Path(file).read_text(encoding="utf-8").removesuffix("\n") for file in files]
        rows = list(zip(*(text.split("\n") for text in texts), strict=True))
    except (Exception, SystemExit) as error:  # sacreBLEU leaves the program where a download is damaged
        raise InputError(
            f"task 'wmt22/{pair}' could not be loaded from {source or 'sacreBLEU'}: {first_line(error)}"
        ) from error
    return [{"source": source, "references": [r for r in references if r]} for source, *references in rows]
