#!/usr/bin/env bash
# Gets what the tests over RDMA need: QEMU, a kernel with rdma_rxe, and the packages that speak to RDMA devices.
#
#   tools/get_rdma_vm.sh [DIRECTORY]         default .venv; the kernel goes to DIRECTORY/rdma
#
# For root on Debian and Ubuntu it installs the packages; else it says which. Exit status 1 with the reason where neither is
# possible: those tests are then skipped.
set -euo pipefail

venv=$(realpath -m "${1:-$(dirname "$0")/../.venv}")
cd "$(dirname "$0")/.."
kernel=$venv/rdma
packages=(qemu-system-x86 busybox-static cpio iproute2 ibverbs-providers python3-pyverbs)

die() { echo "no tests over RDMA: $*" >&2; exit 1; }

complete() {
    command -v qemu-system-x86_64 >/dev/null && [ -x /bin/busybox ] && command -v cpio >/dev/null && command -v rdma >/dev/null &&
        [ -d /usr/lib/python3/dist-packages/pyverbs ]
}

[ "$(uname -m)" = x86_64 ] || die "the guest is an x86_64 one, and this is $(uname -m)"
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    die "this is neither Debian nor Ubuntu. Needed are ${packages[*]} and a kernel package with the module rdma_rxe"
if ! complete; then
    [ "$(id -u)" = 0 ] || die "please install: sudo apt-get install --no-install-recommends ${packages[*]}"
    { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qqy install --no-install-recommends "${packages[@]}"; } \
        >/dev/null || die "apt-get install ${packages[*]} failed"
    complete || die "something of ${packages[*]} is still missing after their installation"
fi
"$venv/bin/python" -c 'import ibverbs' 2>/dev/null ||
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$(sed -n 's/^verbs = \["\(.*\)"\]/\1/p' pyproject.toml)" ||
    die "the package ibverbs cannot be installed"
# The initrd has the modules and one script of the project's.
stamp=$(sha256sum tests/rdma/vm.py tests/rdma/guest_init.sh | sha256sum | cut -d' ' -f1)
if [ -f "$kernel/initrd" ] && [ "$(cat "$kernel/stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
(
    cd "$work"
    apt=(apt-get -qq)
    image() { apt-cache "${apt[@]:1}" depends linux-image-amd64 | sed -n 's/.*Depends: \(linux-image-[^ ]*\).*/\1/p' | head -n 1; }
    name=$(image)
    if [ -z "$name" ] || ! "${apt[@]}" download "$name" 2>"$work/problem"; then
        # The package lists are missing or old, and only root may renew the system's: renew a copy of our own.
        mkdir -p state/lists/partial cache/archives/partial
        apt+=(-o "Dir::State::lists=$work/state/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=)
        "${apt[@]}" update >>"$work/problem" 2>&1
        name=$(image)
        "${apt[@]}" download "${name:-linux-image-amd64}" >>"$work/problem" 2>&1
    fi
    dpkg-deb -x "$name"_*.deb tree
) || die "the kernel package cannot be had: $(tail -n 1 "$work/problem" 2>/dev/null)"
"$venv/bin/python" -m tests.rdma.vm prepare "$work/tree" "$kernel" || die "the kernel package cannot be used"
printf '%s' "$stamp" >"$kernel/stamp"
