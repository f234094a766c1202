"""Model families, built from the layers of `engine/layers`; `families.py` lists them."""
