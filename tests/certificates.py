"""A certificate authority for tests, and certificates that it signs: made by the openssl command."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command, to make certificates")


class Authority:
    """In a folder of its own."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.name = folder, name
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc", "-days", "2"),
            *("-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.ca)),
        )

    def sign(self, name: str, *arguments: str) -> tuple[Path, Path]:
        """Certificate and key. `arguments` are for `openssl x509`, such as `-days -1`."""
        cert, key, request = (self.folder / f"{self.name}-{name}{suffix}" for suffix in (".pem", ".key", ".csr"))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-noenc"),
            *("-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request)),
        )
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.ca), "-CAkey", str(self._key), "-CAcreateserial"),
            *("-days", "2", *arguments, "-out", str(cert)),
        )
        return cert, key

    def settings(self, name: str) -> dict[str, str]:
        """For a node of this name."""
        cert, key = self.sign(name)
        return {"tls_cert": str(cert), "tls_key": str(key), "tls_ca": str(self.ca)}


def _openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=60)
