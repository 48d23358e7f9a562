"""A sysfs tree with PCI functions, drivers and IOMMU groups, and what the kernel does when sysfs is written."""

from pathlib import Path

GPU, AUDIO, BRIDGE, NIC = "0x030200", "0x040300", "0x060400", "0x020000"


class FakeSysfs:
    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("bus/pci/devices", "bus/pci/drivers", "kernel/iommu_groups", "class/vfio-dev"):
            (root / name).mkdir(parents=True)
        (root / "bus/pci/drivers_probe").touch()
        self.loaded = {"vfio-pci"}
        """The drivers that would take a function."""
        self._native: dict[str, str] = {}

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
        if driver not in ("", "vfio-pci"):
            self.loaded.add(driver)
            self._native[address] = driver
        if driver:
            self._bind(folder, driver)
        if group:
            members = self.root / "kernel/iommu_groups" / group / "devices"
            members.mkdir(parents=True, exist_ok=True)
            (members / address).symlink_to(folder)
            (folder / "iommu_group").symlink_to(self.root / "kernel/iommu_groups" / group)
        if vfio:
            entry = self.root / "class/vfio-dev" / vfio
            entry.mkdir()
            (entry / "device").symlink_to(folder)
            (folder / "vfio-dev" / vfio).mkdir(parents=True)
        return folder

    def write(self, path: str, text: str) -> None:
        """A write to sysfs and what the kernel makes of it: by override, else by the driver that knows the function."""
        name = Path(path).name
        if name == "driver_override":
            Path(path).write_text("(null)\n" if text == "\n" else f"{text}\n")
        elif name == "unbind":
            (self.root / "bus/pci/devices" / text / "driver").unlink()
        else:
            assert name == "drivers_probe"
            self._probe(text)

    def _probe(self, address: str) -> None:
        folder = self.root / "bus/pci/devices" / address
        driver = self.state(address)[1] or self._native.get(address, "")
        if driver in self.loaded and not (folder / "driver").exists():
            self._bind(folder, driver)

    def _bind(self, folder: Path, driver: str) -> None:
        at = self.root / "bus/pci/drivers" / driver
        at.mkdir(exist_ok=True)
        (at / "unbind").touch()
        (folder / "driver").symlink_to(at)

    def give(self, address: str, driver: str) -> None:
        """Somebody binds the function to another driver."""
        self.loaded.add(driver)
        folder = self.root / "bus/pci/devices" / address
        self.write(str(folder / "driver/unbind"), address)
        self.write(str(folder / "driver_override"), driver)
        self.write(str(self.root / "bus/pci/drivers_probe"), address)

    def state(self, address: str) -> tuple[str, str]:
        """(driver, override) of a function."""
        folder = self.root / "bus/pci/devices" / address
        link = folder / "driver"
        override = (folder / "driver_override").read_text().strip()
        return link.readlink().name if link.is_symlink() else "", "" if override == "(null)" else override
