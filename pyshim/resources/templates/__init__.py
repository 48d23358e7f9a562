"""Templates: machines that have booted once, and that VMs of new pods continue from. Start with `plan.py`.

`plan.py` says which VMs may, and which machine each of them needs; `store.py` keeps the saved machines. Making one and
continuing from it are a pod's work: `template_maker.py`, `pod/births.py`.
"""
