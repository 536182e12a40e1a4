"""Work moved off the critical path of a device: copies ahead of use, clipping, 8-bit linear layers."""
