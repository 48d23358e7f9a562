"""Binary multiples of a byte (IEC 80000-13), and the kernel's CPU shares of cgroup v1."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
SHARES_PER_CPU = 1024
"""CPU shares that kubelet and Docker set for one CPU. Source: kubelet pkg/kubelet/cm/helpers_linux.go, SharesPerCPU."""
MIN_SHARES = 2
"""The kernel's minimum, which kubelet sets for a pod that requests no CPU. Source: the same file, MinShares."""
HUGEPAGE_MIB = 2
"""The size of x86-64's ordinary huge page, in MiB."""
