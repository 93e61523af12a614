#!/bin/bash
# In a guest, as its first process: two rxe devices, each over an interface of its own, then pytest on the wanted parts.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LC_ALL=C.UTF-8
word() { sed -n "s/.*\b$1=\([^ ]*\).*/\1/p" /proc/cmdline; }

ulimit -l unlimited
ip link set lo up
for n in 0 1; do
    ip link add "dummy$n" type dummy 2>/dev/null # the first comes with the module
    ip link set "dummy$n" mtu 4200 # RoCE of 4,096 bytes, with its headers
    ip addr add "10.77.$n.1/24" dev "dummy$n"
    ip link set "dummy$n" up
    rdma link add "rxe$n" type rxe netdev "dummy$n"
done
rdma link

cd "$(word guest_checkout)" || exit
export PYTHONPATH=$PWD:$PWD/master PYTHONUNBUFFERED=1
files=()
for part in $(word guest_parts | tr , ' '); do
    files+=("tests/rdma/guest_$part.py")
done
# Without the project's conftest, whose imports take long here.
select=$(word guest_select)
"$(word guest_python)" -m pytest ${select:+-k "$select"} --noconftest -p no:cacheprovider -p no:xdist -o timeout=600 --tb=short -m "not slow" -v --durations=12 -rfE "${files[@]}"
echo "GUEST_STATUS=$?"
exec /bin/busybox poweroff -f
