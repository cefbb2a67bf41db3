"""Opening trace files: gzip or plain, by content and not by name, with one-line errors and a hash of what was
read."""

from __future__ import annotations

import gzip
import hashlib
import io
import zlib
from pathlib import Path

from serving.errors import UsageError


def read_bytes(path: Path) -> tuple[bytes, str]:
    """Content of a file (gunzipped when it is gzip) and the SHA-256 of the file itself.

    Raises UsageError when it does not exist, cannot be read, is empty, or is damaged.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise UsageError(
            f"{path}: no such file; check --dataset-path, or the path in the workload file"
        ) from None
    except IsADirectoryError:
        raise UsageError(f"{path}: is a folder; give the file inside it") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    digest = hashlib.sha256(raw).hexdigest()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error):
            raise UsageError(f"{path}: damaged or truncated gzip file; download it again") from None
    if not raw.strip(b" \t\r\n\x00\xef\xbb\xbf"):
        raise UsageError(f"{path}: is empty; give a file with requests")
    return raw, digest


def read_text(path: Path) -> tuple[str, str]:
    """UTF-8 text of a file (BOM removed, line ends as \\n) and the SHA-256 of the file. Raises UsageError."""
    raw, digest = read_bytes(path)
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise UsageError(f"{path}: is UTF-16; save it as UTF-8")
    if b"\x00" in raw[:65536]:
        raise UsageError(f"{path}: is a binary file, not text; expected CSV, JSON or JSON lines")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UsageError(
            f"{path}: line {line}: not UTF-8 text (byte 0x{raw[error.start]:02x}); save it as UTF-8"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text, digest


def first_line(path: Path) -> str:
    """First non-blank line (at most 1 MB of it), for recognising a format. Raises UsageError."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 20)
            if head[:2] == b"\x1f\x8b":
                with gzip.open(io.BytesIO(head)) as unzipped:
                    head = unzipped.read1(1 << 20)
    except (OSError, ValueError, EOFError, zlib.error):
        return _first_line_of(read_text(path)[0])
    if b"\x00" in head or head[:2] in (b"\xff\xfe", b"\xfe\xff") or not head.strip():
        return _first_line_of(read_text(path)[0])
    return _first_line_of(head.decode("utf-8-sig", errors="replace"))


def _first_line_of(text: str) -> str:
    for line in text.lstrip("\n").splitlines():
        if line.strip():
            return line.strip()
    return ""


def plural(count: int, noun: str) -> str:
    """`1 row`, `2,000 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
