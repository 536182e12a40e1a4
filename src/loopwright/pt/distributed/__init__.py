"""Several ranks: process group, rendezvous, gathering, synchronized updates, hang detection, failures."""
