"""The command line `trlx-hybrid`: one module per command."""
