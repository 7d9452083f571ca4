"""`trlx-hybrid launch`: one script on many nodes, as `accelerate launch` would run it on one."""
