"""The file system of the run directory, Lustre above all: room, layout, direct writes."""
