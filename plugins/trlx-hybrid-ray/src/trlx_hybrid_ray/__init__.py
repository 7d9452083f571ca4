"""Ray: where actors go, groups of them called as one object, and a script that runs across nodes."""
