"""`jackline dash`: a page on this machine that shows runs. Reads run folders; changes nothing. Torch-free."""
