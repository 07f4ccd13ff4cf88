"""Reports as one self-contained HTML file: pages of sections, figures and tables (page.py), one module a report."""
