"""One database in a store's folder: which texts and documents there are, and what is stored of them."""
