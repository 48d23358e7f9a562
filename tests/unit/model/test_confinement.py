"""SELinux labels of what serves a guest, made from the spec's: formats only, as no test machine has SELinux."""

import pytest

from pyshim.model.confinement import vmm_selinux_label
from pyshim.model.errors import InvalidArgument


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("", ""),
        ("system_u:system_r:container_t:s0:c4,c1023", "system_u:system_r:container_kvm_t:s0:c4,c1023"),
        ("system_u:system_r:spc_t:s0", "system_u:system_r:container_kvm_t:s0"),
        ("u:r:t:s0-s15:c0.c1023", "u:r:container_kvm_t:s0-s15:c0.c1023"),
        ("u:r:t", "u:r:container_kvm_t"),
    ],
)
def test_the_pair_of_categories_stays_and_the_type_is_the_vmms(text: str, label: str) -> None:
    assert vmm_selinux_label(text, "container_kvm_t") == label


@pytest.mark.parametrize(
    "text", ["a", "a:b", ":::", "u:r:t:s0 x", "u:r:t:s0\n", "u:r:t:s0\0", "u r:r:t", "u:r:t:" + "c" * 5000]
)
def test_another_form_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidArgument, match=r"process.selinuxLabel .* is not user:role:type:level"):
        vmm_selinux_label(text, "container_kvm_t")


def test_a_type_with_a_colon_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="selinux_vmm_type 'a:s0' is not an SELinux type"):
        vmm_selinux_label("u:r:t:s0", "a:s0")
