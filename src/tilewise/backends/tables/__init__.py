"""Masks as tables on a device, for any GPU backend."""
