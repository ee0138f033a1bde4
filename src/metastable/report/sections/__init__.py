"""Sections of a run's page, each under the name of what measures it (`metastable.summary`)."""
