"""Where a request goes in a prefill/decode cluster, and whether it is served: no socket, clock or thread in here."""
