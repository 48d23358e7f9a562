"""What holds for every test."""

from hypothesis import HealthCheck, settings

# A busy machine is no failure: an example may take as long as it takes, and so may its making.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
