#!/bin/busybox sh
# The first process of a guest: kernel modules, then this machine's / as a read-only share, with what is written on top in memory.
b=/bin/busybox
$b mount -t proc none /proc
$b mount -t sysfs none /sys
$b mount -t devtmpfs none /dev
for module in $($b cat /modules/order); do
    $b insmod "/modules/$module.ko" || echo "guest: no module $module"
done
$b mkdir -p /below /above /root
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=1048576 host /below &&
    $b mount -t tmpfs none /above &&
    $b mkdir /above/files /above/work &&
    $b mount -t overlay -o lowerdir=/below,upperdir=/above/files,workdir=/above/work none /root || {
    echo "GUEST_STATUS=98"
    $b poweroff -f
}
for folder in proc sys dev; do
    $b mount --move "/$folder" "/root/$folder"
done
$b mkdir -p /root/dev/shm /root/dev/pts
$b mount -t tmpfs none /root/dev/shm
$b mount -t devpts none /root/dev/pts
script=$($b sed -n 's/.*guest_script=\([^ ]*\).*/\1/p' /root/proc/cmdline)
exec $b switch_root /root /bin/bash "$script"
