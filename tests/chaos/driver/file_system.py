"""A small file system of its own, so that it can be filled without anybody else's room."""

import os
import subprocess
from pathlib import Path

_STEP_BYTES = 1 << 20


class SmallFileSystem:
    """A tmpfs at `folder`, where this user may mount one; else a plain folder, which cannot be filled."""

    def __init__(self, folder: Path, num_bytes: int) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._ballast = folder / "ballast"
        command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes},mode=0700", "weir-chaos", str(folder)]
        try:
            mounted = subprocess.run(command, capture_output=True, text=True, check=False)
            self.why_not = mounted.stderr.strip() if mounted.returncode else ""
        except OSError as error:
            self.why_not = str(error)

    @property
    def is_real(self) -> bool:
        return not self.why_not

    def fill(self) -> None:
        """Until not a byte is free."""
        if not self.is_real:
            raise RuntimeError(f"{self.folder} is not a file system of its own: {self.why_not}")
        with self._ballast.open("ab", buffering=0) as file:
            step = _STEP_BYTES
            while step:
                try:
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), step)
                except OSError:
                    step //= 2

    def free(self) -> None:
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Raises CalledProcessError if it cannot be taken away."""
        self.free()
        if self.is_real:
            subprocess.run(["umount", str(self.folder)], check=True, capture_output=True)
            self.why_not = "it is closed"
