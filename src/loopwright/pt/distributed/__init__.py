"""Several processes: process group, rendezvous, gathering, synchronised updates, hang detection, failures."""
