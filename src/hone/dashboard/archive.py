"""Stream a directory as a tar archive, without a temporary file or the whole archive in memory."""

import tarfile
from collections.abc import Iterator
from pathlib import Path

BLOCK_BYTES = 2**20


class _Pipe:
    """A buffer that tarfile writes to and the response reads from."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self.parts.append(bytes(data))
        return len(data)

    def take_written(self) -> bytes:
        whole = b"".join(self.parts)
        self.parts = []
        return whole


def tar_directory(directory: Path, name: str) -> Iterator[bytes]:
    """Yield a tar archive of a directory's plain files, without links.

    Paths in the archive begin with `name`/.
    """
    pipe = _Pipe()
    with tarfile.open(fileobj=pipe, mode="w|", format=tarfile.PAX_FORMAT) as archive:  # type: ignore[call-overload]
        for file in sorted(directory.rglob("*")):
            if not file.is_file() or file.is_symlink():
                continue
            about = archive.gettarinfo(
                str(file), arcname=f"{name}/{file.relative_to(directory).as_posix()}"
            )
            about.uid = about.gid = 0
            about.uname = about.gname = ""
            # Not addfile(): with contents it reads the whole file at once, and newer Pythons refuse
            # it without.
            head = about.tobuf(archive.format, archive.encoding, archive.errors)
            archive.fileobj.write(head)
            with file.open("rb") as opened:
                left = about.size
                while left and (block := opened.read(min(BLOCK_BYTES, left))):
                    left -= len(block)
                    archive.fileobj.write(block)
                    yield pipe.take_written()
            filler = -about.size % tarfile.BLOCKSIZE
            archive.fileobj.write(b"\0" * (filler + left))
            archive.offset += len(head) + about.size + filler
    yield pipe.take_written()
