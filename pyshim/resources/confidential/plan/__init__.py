"""Pure: the guard of a VM and the initdata document."""
