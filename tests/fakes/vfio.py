"""A sysfs tree with PCI functions, their drivers and IOMMU groups."""

from pathlib import Path

GPU, AUDIO, BRIDGE, NIC = "0x030200", "0x040300", "0x060400", "0x020000"


class FakeSysfs:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups", "class/vfio-dev"):
            (root / name).mkdir(parents=True)
        (root / "bus/pci/drivers_probe").touch()

    def function(
        self,
        address: str,
        class_code: str = GPU,
        *,
        vendor: str = "0x10de",
        device: str = "0x2331",
        driver: str = "vfio-pci",
        group: str = "",
        vfio: str = "",
    ) -> Path:
        folder = self.root / "bus/pci/devices" / address
        folder.mkdir()
        for name, text in (("vendor", vendor), ("device", device), ("class", class_code), ("driver_override", "")):
            (folder / name).write_text(f"{text}\n")
        if driver:
            (self.root / "bus/pci/drivers" / driver).mkdir(exist_ok=True)
            (self.root / "bus/pci/drivers" / driver / "unbind").touch()
            (folder / "driver").symlink_to(self.root / "bus/pci/drivers" / driver)
        if group:
            members = self.root / "kernel/iommu_groups" / group / "devices"
            members.mkdir(parents=True, exist_ok=True)
            (members / address).symlink_to(folder)
        if vfio:
            entry = self.root / "class/vfio-dev" / vfio
            entry.mkdir()
            (entry / "device").symlink_to(folder)
        return folder
