"""Starting a script on several processes: on this machine, on a cluster, on Ray; and checks of the hardware."""
