# what bash cells of the site's pages run first (BASH_ENV, conf.py)
unset FORCE_COLOR CLICOLOR_FORCE CLICOLOR
export TERM=dumb
