"""The cold tier: pages that left DRAM, in one preallocated file, found through an LMDB index."""
