"""Devices: one small interface (`base.Driver`), one module per device."""
