"""Chooses the guard of a confidential guest on this host, or refuses: a plain VM never replaces it."""

from pyshim.model.confidential import (
    SEV_POLICY_ES,
    SEV_POLICY_NO_DEBUG,
    SNP_HOST_DATA_BYTES,
    TDX_CONFIG_ID_BYTES,
    Guard,
    Initdata,
    SevGuard,
    SnpGuard,
    TdxGuard,
    Tee,
    TeeFacts,
    UnixQuotes,
    VsockQuotes,
)
from pyshim.model.config import Config, HypervisorConfig
from pyshim.model.errors import FailedPrecondition, InvalidArgument
from pyshim.model.host_facts import HostFacts

SNP_CPU_MODEL = "EPYC-v4"
"""A named model: what the guest may rely on is measured, and must not differ between hosts. Kata's choice."""
HOST_CID = 2
QUOTE_PORT = 4050
"""The default address of TDX's quote generation service."""


def guard_of(config: Config, host: HostFacts, initdata: Initdata | None) -> Guard | None:
    """The guard, None without `confidential_guest`. Raises FailedPrecondition saying what was probed."""
    hypervisor = config.hypervisor
    if not hypervisor.confidential_guest:
        if hypervisor.sev_snp_guest:
            raise InvalidArgument(f"read sev_snp_guest in '{config.source}': true needs confidential_guest = true")
        return None
    _check(config)
    if not host.kvm_usable:
        raise FailedPrecondition(
            f"start vm: confidential_guest in '{config.source}' needs KVM: {host.kvm_reason}; {_looked_at(host.tee)}"
        )
    match _technology(config, host.tee):
        case Tee.TDX:
            digest = initdata.digest_of(TDX_CONFIG_ID_BYTES) if initdata else b""
            return TdxGuard(mrconfigid=digest, quotes=_quotes(hypervisor, host.tee))
        case Tee.SNP:
            return SnpGuard(
                policy=hypervisor.snp_guest_policy,
                id_block=hypervisor.snp_id_block,
                id_auth=hypervisor.snp_id_auth,
                host_data=initdata.digest_of(SNP_HOST_DATA_BYTES) if initdata else b"",
            )
        case Tee.SEV | Tee.SEV_ES:
            if initdata is not None:
                raise FailedPrecondition(
                    f"start vm: initdata with SEV in '{config.source}': its launch has no field for a digest"
                )
            return SevGuard(policy=_sev_policy(config, host.tee), launch_hook=hypervisor.sev_launch_hook)


def cpu_model(guard: Guard) -> str:
    """SNP has a named model; the others take the host's own."""
    return SNP_CPU_MODEL if isinstance(guard, SnpGuard) else "host"


def _check(config: Config) -> None:
    hypervisor = config.hypervisor
    refusal = hypervisor.machine.refuses_confidential
    problems = (
        (hypervisor.shared_fs != "none", f'shared_fs = "{hypervisor.shared_fs}": confidential_guest needs "none"'),
        (not hypervisor.firmware, "firmware is not set: a confidential guest's first code is measured"),
        (bool(refusal), f'machine_type = "{hypervisor.machine_type}": {refusal}'),
        (hypervisor.enable_hugepages, "enable_hugepages = true: a confidential guest has private memory"),
        (hypervisor.enable_virtio_mem, "enable_virtio_mem = true: a confidential guest has memory of fixed size"),
        (
            hypervisor.reclaim_guest_freed_memory,
            "reclaim_guest_freed_memory = true: a confidential guest's free pages cannot be reported to the host",
        ),
        (
            hypervisor.enable_guest_swap,
            "enable_guest_swap = true: a confidential guest's memory would be written to the host as it is",
        ),
        (hypervisor.accelerator == "tcg", 'accelerator = "tcg": confidential_guest needs KVM'),
        (
            hypervisor.sev_snp_guest and hypervisor.confidential_technology not in ("auto", "snp"),
            f'sev_snp_guest = true contradicts confidential_technology = "{hypervisor.confidential_technology}"',
        ),
        (
            bool(hypervisor.snp_id_block) != bool(hypervisor.snp_id_auth),
            "snp_id_block and snp_id_auth are only of use together",
        ),
    )
    for is_wrong, text in problems:
        if is_wrong:
            raise InvalidArgument(f"read '{config.source}': {text}")


def _technology(config: Config, facts: TeeFacts) -> Tee:
    hypervisor = config.hypervisor
    wanted = "snp" if hypervisor.sev_snp_guest else hypervisor.confidential_technology
    choices = {
        "tdx": (Tee.TDX,),
        "snp": (Tee.SNP,),
        "sev": (Tee.SEV_ES, Tee.SEV),
        "auto": (Tee.TDX, Tee.SEV_ES, Tee.SEV),
    }[wanted]
    for tee in choices:
        if tee in facts.available:
            return tee
    names = " or ".join({"tdx": "TDX", "snp": "SEV-SNP", "sev-es": "SEV-ES", "sev": "SEV"}[tee] for tee in choices)
    raise FailedPrecondition(
        f"start vm: confidential_guest in '{config.source}': this host has no {names}: {_looked_at(facts)}"
    )


def _looked_at(facts: TeeFacts) -> str:
    return "probed: " + ("; ".join(facts.probed) or "nothing")


def _quotes(hypervisor: HypervisorConfig, facts: TeeFacts) -> VsockQuotes | UnixQuotes:
    """The port that was asked for; else the service's unix socket where it is, else its usual port (Kata's rule)."""
    port = hypervisor.tdx_quote_generation_service_socket_port
    if port == 0 and facts.quote_socket:
        return UnixQuotes(path=facts.quote_socket)
    return VsockQuotes(cid=HOST_CID, port=port or QUOTE_PORT)


def _sev_policy(config: Config, facts: TeeFacts) -> int:
    """The operator's, or no debugging and encrypted registers where they can be had."""
    has_es = Tee.SEV_ES in facts.available
    policy = config.hypervisor.sev_guest_policy
    if policy == 0:
        return SEV_POLICY_NO_DEBUG | (SEV_POLICY_ES if has_es else 0)
    if policy & SEV_POLICY_ES and not has_es:
        raise FailedPrecondition(
            f"start vm: sev_guest_policy = {policy:#x} in '{config.source}' asks for SEV-ES: {_looked_at(facts)}"
        )
    if not policy & SEV_POLICY_ES and Tee.SEV not in facts.available:
        raise FailedPrecondition(
            f"start vm: sev_guest_policy = {policy:#x} in '{config.source}' asks for plain SEV: {_looked_at(facts)}"
        )
    return policy
