"""AgAb: how strongly an antibody binds an antigen."""
