"""Support that only this project's tests and benchmarks need; what authors of plugins use is `trlx_hybrid.testing`."""
