"""The pod's network on the host: its namespace, the links in it, the taps beside them, its loopback addresses.

Read `pod_network.py` first. What `delete` and the ledger's undo use (`netns`, `link_removal`, `link_search`) is
import-light.
"""
