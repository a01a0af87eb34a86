"""Flash decode on Hopper: a few new tokens of each sequence against its cache, in one launch that reads lengths and pages on the GPU."""
