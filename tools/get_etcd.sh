#!/usr/bin/env bash
# Puts an etcd server into the virtual environment for the tests of discovery and election, without root.
#
#   tools/get_etcd.sh [DIRECTORY]            default .venv; the binary becomes DIRECTORY/etcd/usr/bin/etcd
#
# One that is installed is linked; else Debian's or Ubuntu's package is downloaded and unpacked there. Exit status 1 with the
# reason where neither is possible: the tests that need it are then skipped.
set -euo pipefail

venv=$(realpath -m "${1:-$(dirname "$0")/../.venv}")
target=$venv/etcd/usr/bin/etcd
package=etcd-server

die() { echo "no etcd for the tests: $*" >&2; exit 1; }

if "$target" --version >/dev/null 2>&1; then
    exit 0
fi
rm -rf "$venv/etcd"
if installed=$(command -v etcd); then
    mkdir -p "$(dirname "$target")"
    ln -s "$installed" "$target"
    exit 0
fi
command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null ||
    die "no etcd in PATH, and this is neither Debian nor Ubuntu. Install etcd and run $0 again"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
apt=(apt-get -qq)
if ! "${apt[@]}" download "$package" 2>"$work/problem"; then
    # The package lists are missing or old, and only root may renew the system's: renew a copy of our own.
    mkdir -p state/lists/partial cache/archives/partial
    apt+=(-o "Dir::State::lists=$work/state/lists" -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=)
    { "${apt[@]}" update && "${apt[@]}" download "$package"; } >>"$work/problem" 2>&1 ||
        die "apt-get download $package: $(tail -n 1 "$work/problem")"
fi
dpkg-deb -x "$package"_*.deb "$work/tree"
[ -x "$work/tree/usr/bin/etcd" ] || die "$package has no /usr/bin/etcd"
"$work/tree/usr/bin/etcd" --version >/dev/null 2>&1 || die "the binary of $package does not run here"
mkdir -p "$venv"
cp -r "$work/tree" "$venv/etcd"
