"""What every test shares."""

from hypothesis import settings

# A busy machine must not fail a property: time limits are pytest's (pyproject.toml), not one for every example.
settings.register_profile("pipelab", deadline=None)
settings.load_profile("pipelab")
