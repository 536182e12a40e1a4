"""Starting a script on many processes: here, on a cluster, on Ray; and looking at what there is to run on."""
