#!/usr/bin/env bash
# Makes the virtual environment for the demo, the tests and development: SGLang on CPU and this package, editable.
#
#   tools/setup_venv.sh [DIRECTORY]          default .venv; PYTHON and TORCH_INDEX as in the Makefile
#
# Each step leaves a stamp with what it installed, so a second run does only what has changed.
set -euo pipefail

cd "$(dirname "$0")/.."
venv=${1:-.venv}
requirements=requirements/sglang-cpu.txt
sglang=sglang==0.5.23
torchvision=torchvision==0.28.0
router=sglang-router==0.3.2
torch=$(grep '^torch==' "$requirements")
steps=7
number=0

say() { printf '\n[%d/%d] %s\n' "$number" "$steps" "$*"; }
die() { printf '\n%s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        if command -v "$candidate" >/dev/null && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed; tried: ${PYTHON:-python3 python3.13 python3.12 python3.11}. Set PYTHON=/path/to/python."
}

# step NAME KEY TITLE COMMAND...: run the command unless the stamp NAME says KEY
step() {
    local stamp="$venv/.stamps/$1" key=$2 title=$3 began=$SECONDS
    shift 3
    number=$((number + 1))
    if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ]; then
        say "$title: done before"
        return
    fi
    say "$title"
    "$@"
    printf '%s' "$key" >"$stamp"
    printf '      %d s\n' $((SECONDS - began))
}

# pip warns once a package about every --find-links place of the machine's configuration that does not exist
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" 2> >(grep -v 'Location .* is ignored' >&2); }
digest() { sha256sum "$@" | cut -d' ' -f1 | tr '\n' ' '; }

install_torch() {
    if [ -z "${TORCH_INDEX:-}" ]; then
        echo "      On PyPI torch is the CUDA build, gigabytes larger than needed. For the CPU build:"
        echo "      make venv TORCH_INDEX=https://download.pytorch.org/whl/cpu"
    fi
    pip install "$torch" ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
}

# Only for tests and demos of prefill and decode on servers of their own, which do without where no wheel of it fits.
install_router() {
    pip install --no-deps "$router" || echo "      $router cannot be installed here: nothing else needs it."
}

check() {
    PYTHONPATH=hicache_mooncake/testing/sglang_cpu/shims SGLANG_USE_CPU_ENGINE=1 "$venv/bin/python" - <<'PYTHON'
import hicache_master, hicache_mooncake, torch, torchvision  # noqa: F401
import sglang.srt.mem_cache.hicache_storage  # noqa: F401
from importlib.metadata import PackageNotFoundError, entry_points, version

plugins = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
missing = {"cpu_hicache", "cpu_pd", "hicache_mooncake"} - plugins
if missing:
    raise SystemExit(f"sglang would not find the plugins {sorted(missing)}, only {sorted(plugins)}")
try:
    router = version("sglang-router")
except PackageNotFoundError:
    router = "none"
print(f"      sglang {version('sglang')}, torch {torch.__version__}, hicache-mooncake {version('hicache-mooncake')}, router {router}")
if torch.version.cuda is not None:
    print("      This torch is a CUDA build: it works without a GPU too, it is only larger.")
PYTHON
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        die "$python has no venv module. On Debian and Ubuntu: sudo apt install python3-venv (or python3.N-venv for that version)"
    rm -rf "$venv"
    number=1 say "make $venv with $("$python" --version)"
    "$python" -m venv "$venv"
else
    number=1 say "$venv exists"
fi
number=1
mkdir -p "$venv/.stamps"

step torch "$torch ${TORCH_INDEX:-}" "$torch" install_torch
step requirements "$(digest "$requirements")" "the other dependencies of SGLang, some 400 MB" pip install -r "$requirements"
step sglang "$sglang $torchvision" "$sglang and $torchvision without their dependencies" pip install --no-deps "$sglang" "$torchvision"
step router "$router" "$router without its dependencies, which SGLang has" install_router
step package "$(digest pyproject.toml) $PWD" "hicache-mooncake, editable, with what its tests and demos need" pip install -e '.[dev,demo]'
step check "$(cat "$venv"/.stamps/{torch,requirements,sglang,router,package})" "check" check
