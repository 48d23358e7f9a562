#!/bin/busybox sh
# The guest's first process: loads drivers, mounts the root image, and goes on as the agent (docs/GUEST.md).
# It is /init of the initrd, and /shell too: under that name (`rdinit=/shell`) it ends in a shell instead of the agent.

set -f # words of the kernel command line are not patterns

# The reason is on the console, and the kernel panics, as it does at the end of process 1.
fail() {
    echo "<3>guest init: cannot $*" >/dev/kmsg
    exit 1
}

mount -t proc proc /proc
# There is one devtmpfs: what is made here is in the root's /dev too.
mount -t devtmpfs dev /dev
mkdir /dev/pts /dev/shm /dev/net
ln -s /proc/self/fd /dev/fd
# The kernel loads the module when one of these is opened.
mknod -m 660 /dev/loop-control c 10 237
mknod -m 660 /dev/net/tun c 10 200

root=/dev/vda1 type=erofs flags=ro,nodev port=
read -r words </proc/cmdline
for word in $words; do
    case $word in
        root=*) root=${word#*=} ;;
        rootfstype=*) type=${word#*=} ;;
        rootflags=*) flags=ro,nodev,${word#*=} ;;
        agent.server_addr=serial:*) port=${word##*/} ;;
    esac
done

# A driver that cannot be loaded is missed by what needs it.
read -r modules </etc/modules
case $root in
    /dev/pmem*) read -r pmem </etc/modules.pmem ;;
    *) pmem= ;;
esac
modprobe -a $modules $pmem

# The console's driver is there only now. A machine without a console device is no reason to stop.
if (: </dev/console) 2>/dev/null; then
    exec </dev/console >/dev/console 2>&1
fi

# The kernel's log is the pod's own: as with Kata's kernel, no capability is needed to read it.
echo 0 >/proc/sys/kernel/dmesg_restrict

# The driver of persistent memory finds the device a moment after it was loaded: 5 s are plenty.
tries=50
until [ -b "$root" ]; do
    tries=$((tries - 1))
    [ $tries -gt 0 ] || fail "find the root image: $root is not there"
    sleep 0.1
done
said=$(mount -t "$type" -o "$flags" "$root" /root 2>&1) || fail "mount root image $root as $type: $said"
said=$(chroot /root mount -a 2>&1) || fail "mount what /etc/fstab lists: $said"
mkdir /root/var/lib /root/var/log

# The agent waits for its port however late it comes. Without the driver, which is the console's too, it waits unheard.
[ -z "$port" ] || [ -d /root/sys/class/virtio-ports ] || fail "find the agent's port $port: no driver virtio_console"

if [ -x /root/usr/bin/kata-agent ]; then
    # kata-agent mounts /proc and everything else itself. modprobe needs /proc too, so it is mounted until modprobe ends.
    mount -t proc proc /root/proc
    read -r modules </etc/modules.later
    chroot /root modprobe -a $modules
    umount /root/proc
    set -- /usr/bin/kata-agent
else
    # Our agent loads the other drivers itself, at a low priority.
    set -- /usr/bin/python3 -IS /usr/lib/agent/start.py
fi
case $0 in
    */shell) set -- /bin/setsid -c /bin/sh -l ;;
esac
# The environment is what this line says: the kernel gives its first process words of the command line in it.
exec env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=linux LC_ALL=C.UTF-8 switch_root /root "$@"
