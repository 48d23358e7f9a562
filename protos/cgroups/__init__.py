"""Container metrics in the two shapes that consumers of the Task service's Stats know, one per cgroup version.

Only the messages; reading cgroups is not done here. Read first: `v2.proto`.
"""
