"""How `make html` builds the book: the notebooks as they are stored, nothing is executed."""

project = "pipelab"
author = "the pipelab authors"
html_title = "pipelab: pipeline parallelism, tried and shown"
extensions = ["myst_nb"]
root_doc = "docs/html/index"
include_patterns = ["docs/html/index.md", "docs/*.md", "notebooks/*.ipynb", "exercises/*.ipynb", "exercises/README.md"]
myst_enable_extensions = ["dollarmath", "amsmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
# a widget is alive only with a kernel: show the picture that is stored beside it
nb_mime_priority_overrides = [("html", "image/png", 0), ("html", "application/vnd.jupyter.widget-view+json", 90)]
html_extra_path = ["index.html"]  # leads from the folder to its first page
html_static_path, html_css_files = ["book.css"], ["book.css"]
html_theme = "sphinx_book_theme"
html_theme_options = {
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "use_download_button": False,
    "navbar_persistent": [],
}
suppress_warnings = ["myst.xref_missing"]  # links to files that are no pages, as the Makefile
