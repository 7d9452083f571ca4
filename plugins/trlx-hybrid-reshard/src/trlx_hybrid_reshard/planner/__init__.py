"""`trlx-hybrid reshard-plan`: what a reshard costs, from a config alone. No run needs it but for its advice."""
