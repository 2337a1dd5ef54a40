# Installs /source with these extras in /opt/trainwright, in the versions of the lock file, and
# removes what only compilers and tests use. Of TORCH_INDEX, if it is set, comes torch and no more.
set -eu
install() {
    /opt/trainwright/bin/pip install --no-cache-dir --disable-pip-version-check --progress-bar off \
        --constraint /source/infra/requirements.lock "$@"
}
install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
install "/source[$1]"
/opt/trainwright/bin/pip check --disable-pip-version-check

cd /opt/trainwright/lib/python3*/site-packages
rm -rf torch/include torch/share torch/test pyarrow/include pyarrow/src
find torch/bin -type f ! -name torch_shm_manager -delete
find . -name '*.a' -delete
for package in numpy scipy sklearn pandas pyarrow sympy networkx dask distributed; do
    [ ! -d $package ] || find $package -depth -type d -name tests -exec rm -rf {} +
done
