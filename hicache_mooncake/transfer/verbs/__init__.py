"""RDMA: what the verbs transport is made of. `api` is the small interface over verbs that the rest is written against."""
