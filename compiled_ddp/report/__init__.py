"""Tables of what a wrapper has done. Nothing reads them."""
