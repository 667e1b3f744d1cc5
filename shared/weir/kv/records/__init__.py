"""Sequence records: what another process needs to go on with a sequence, kept beside its pages."""
