"""The smallest trlx_hybrid plugin."""
