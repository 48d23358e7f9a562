from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class IPFamily(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    v4: _ClassVar[IPFamily]
    v6: _ClassVar[IPFamily]

class FSGroupChangePolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    Always: _ClassVar[FSGroupChangePolicy]
    OnRootMismatch: _ClassVar[FSGroupChangePolicy]
v4: IPFamily
v6: IPFamily
Always: FSGroupChangePolicy
OnRootMismatch: FSGroupChangePolicy

class IPAddress(_message.Message):
    __slots__ = ("family", "address", "mask")
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    family: IPFamily
    address: str
    mask: str
    def __init__(self, family: _Optional[_Union[IPFamily, str]] = ..., address: _Optional[str] = ..., mask: _Optional[str] = ...) -> None: ...

class Interface(_message.Message):
    __slots__ = ("device", "name", "IPAddresses", "mtu", "hwAddr", "devicePath", "type", "raw_flags")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    IPADDRESSES_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    HWADDR_FIELD_NUMBER: _ClassVar[int]
    DEVICEPATH_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    RAW_FLAGS_FIELD_NUMBER: _ClassVar[int]
    device: str
    name: str
    IPAddresses: _containers.RepeatedCompositeFieldContainer[IPAddress]
    mtu: int
    hwAddr: str
    devicePath: str
    type: str
    raw_flags: int
    def __init__(self, device: _Optional[str] = ..., name: _Optional[str] = ..., IPAddresses: _Optional[_Iterable[_Union[IPAddress, _Mapping]]] = ..., mtu: _Optional[int] = ..., hwAddr: _Optional[str] = ..., devicePath: _Optional[str] = ..., type: _Optional[str] = ..., raw_flags: _Optional[int] = ...) -> None: ...

class Route(_message.Message):
    __slots__ = ("dest", "gateway", "device", "source", "scope", "family", "flags", "mtu")
    DEST_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    MTU_FIELD_NUMBER: _ClassVar[int]
    dest: str
    gateway: str
    device: str
    source: str
    scope: int
    family: IPFamily
    flags: int
    mtu: int
    def __init__(self, dest: _Optional[str] = ..., gateway: _Optional[str] = ..., device: _Optional[str] = ..., source: _Optional[str] = ..., scope: _Optional[int] = ..., family: _Optional[_Union[IPFamily, str]] = ..., flags: _Optional[int] = ..., mtu: _Optional[int] = ...) -> None: ...

class ARPNeighbor(_message.Message):
    __slots__ = ("toIPAddress", "device", "lladdr", "state", "flags")
    TOIPADDRESS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    LLADDR_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FLAGS_FIELD_NUMBER: _ClassVar[int]
    toIPAddress: IPAddress
    device: str
    lladdr: str
    state: int
    flags: int
    def __init__(self, toIPAddress: _Optional[_Union[IPAddress, _Mapping]] = ..., device: _Optional[str] = ..., lladdr: _Optional[str] = ..., state: _Optional[int] = ..., flags: _Optional[int] = ...) -> None: ...
