"""A virtual machine with RDMA devices in software (rdma_rxe), which needs no card, no root and no hardware virtualization.

    python -m tests.rdma.vm prepare FOLDER KERNEL   # from the kernel package that dpkg-deb unpacked into FOLDER
    python -m tests.rdma.vm run KERNEL PART...      # runs tests/rdma/guest_PART.py in a guest; exit status as pytest's
        RDMA_SELECT=WORD in the environment: only tests with that word in their name

The guest sees this machine's files read-only, so it runs this checkout with this Python; what it writes is gone after it.
QEMU emulates the processor: KVM, where there is one, is not asked, since that of a nested guest is far slower than this.
"""

from __future__ import annotations

import gzip
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zlib
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PARTS = ("bindings", "doctor", "transport", "nodes")
QEMU = "qemu-system-x86_64"
LIMIT_S = 1800.0
NO_ANSWER = 99
_MEMORY_MIB = 2048
_MODULES = ("virtio_pci", "9pnet_virtio", "9p", "overlay", "dummy", "crc32_generic", "ib_uverbs", "rdma_ucm", "rdma_rxe")
"""crc32_generic: rdma_rxe needs it for its checksums, but does not say so, and nothing loads modules on demand there."""


def prepare(package: Path, kernel: Path) -> None:
    """Of an unpacked kernel package: the kernel, unpacked since that boots faster, and a file system with its modules."""
    kernel.mkdir(parents=True, exist_ok=True)
    (image,) = (package / "boot").glob("vmlinuz-*")
    (kernel / "vmlinux").write_bytes(_unpacked(image.read_bytes()))
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        for folder in ("bin", "dev", "proc", "sys", "modules"):
            (root / folder).mkdir()
        shutil.copy("/bin/busybox", root / "bin/busybox")
        shutil.copy(HERE / "guest_init.sh", root / "init")
        (root / "init").chmod(0o755)
        order = _in_load_order(package)
        for module in order:
            shutil.copy(module, root / "modules" / f"{_name(module)}.ko")
        (root / "modules/order").write_text("".join(f"{_name(module)}\n" for module in order))
        names = sorted(str(path.relative_to(root)) for path in root.rglob("*"))
        archive = subprocess.run(
            ["cpio", "-o", "-H", "newc", "--quiet"],
            cwd=root,
            input="\n".join(names).encode(),
            stdout=subprocess.PIPE,
            check=True,
        )
        # Last, and at once: it says that all is there.
        (kernel / "initrd.new").write_bytes(gzip.compress(archive.stdout, 1))
        (kernel / "initrd.new").rename(kernel / "initrd")


def _unpacked(image: bytes) -> bytes:
    """The ELF file in a bzImage."""
    for magic, unpack in ((b"\xfd7zXZ\0", lzma.LZMADecompressor), (b"\x1f\x8b\x08", None)):
        at = image.find(magic)
        while at >= 0:
            try:
                found = unpack().decompress(image[at:]) if unpack else _gunzip(image[at:])
            except (lzma.LZMAError, OSError, EOFError):
                found = b""
            if found.startswith(b"\x7fELF"):
                return found
            at = image.find(magic, at + 1)
    raise SystemExit("the kernel is packed in a way that is not known here: neither xz nor gzip")


def _gunzip(packed: bytes) -> bytes:
    return zlib.decompressobj(31).decompress(packed)


def _name(module: Path) -> str:
    return module.name.partition(".")[0].replace("-", "_")


def _in_load_order(package: Path) -> list[Path]:
    there = {_name(path): path for path in (package / "lib/modules").rglob("*.ko")}
    order: list[Path] = []

    def add(name: str) -> None:
        if name not in there:
            raise SystemExit(f"the kernel package has no module {name}")
        found = re.search(rb"\0depends=([^\0]*)\0", there[name].read_bytes())
        for needed in found[1].decode().replace("-", "_").split(",") if found else []:
            if needed and there.get(needed) not in order:
                add(needed)
        if there[name] not in order:
            order.append(there[name])

    for name in _MODULES:
        add(name)
    return order


def missing(kernel: Path) -> str:
    """Why no guest can be started here; empty if one can."""
    if not (kernel / "initrd").exists():
        return f"no kernel in {kernel}: tools/get_rdma_vm.sh gets it, and says what else is needed"
    return "" if shutil.which(QEMU) else f"{QEMU} is not installed: tools/get_rdma_vm.sh does it, or says how"


def run(kernel: Path, parts: tuple[str, ...], limit_s: float = LIMIT_S, select: str = "") -> tuple[int, str]:
    """pytest's exit status in the guest, and what the guest printed, which is also shown as it comes. NO_ANSWER when it did not
    get so far: it crashed, or ran out of time."""
    words = (
        "console=ttyS0 quiet panic=-1 nokaslr mitigations=off cryptomgr.notests tsc=reliable random.trust_cpu=on "
        f"guest_script={HERE / 'guest.sh'} guest_checkout={CHECKOUT} guest_python={sys.executable} "
        f"guest_parts={','.join(parts)} guest_select={select}"
    )
    command = [
        QEMU, "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-machine", "q35", "-smp", "2", "-m", str(_MEMORY_MIB),
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio",
        "-kernel", str(kernel / "vmlinux"), "-initrd", str(kernel / "initrd"), "-append", words,
        "-fsdev", "local,id=host,path=/,security_model=none,readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=host,mount_tag=host",
    ]  # fmt: skip
    printed: list[str] = []
    guest = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    clock = threading.Timer(limit_s, guest.kill)
    clock.start()
    try:
        assert guest.stdout is not None
        for raw in guest.stdout:
            line = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f]", "", raw.decode(errors="replace"))
            printed.append(line)
            print(line, end="" if line.endswith("\n") else "\n", flush=True)
    finally:
        clock.cancel()
        guest.kill()
        guest.wait()
    text = "".join(printed)
    status = re.findall(r"GUEST_STATUS=(\d+)", text)
    return int(status[-1]) if status else NO_ANSWER, text


def main(arguments: list[str]) -> int:
    if len(arguments) == 3 and arguments[0] == "prepare":
        prepare(Path(arguments[1]), Path(arguments[2]))
        return 0
    if len(arguments) >= 2 and arguments[0] == "run":
        kernel, parts = Path(arguments[1]), tuple(arguments[2:]) or PARTS
        reason = missing(kernel) or "".join(
            f"no part {part}, only {', '.join(PARTS)}. " for part in parts if part not in PARTS
        )  # fmt: skip
        if reason:
            print(f"no tests over RDMA: {reason}")
            return 1
        return run(kernel, parts, select=os.environ.get("RDMA_SELECT", ""))[0]
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
